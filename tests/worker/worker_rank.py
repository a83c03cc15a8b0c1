"""What a rank's process does in the tests of split stages: a real worker on the demo's weights, with a real pool."""

from __future__ import annotations

import threading

import numpy as np

from omni_notebook.config import load_pipeline
from omni_notebook.memory.base import WEIGHTS
from omni_notebook.models.tokenizer import TextTokenizer
from omni_notebook.protocol import RankId, SleepTask, WakeTask
from omni_notebook.worker.batches import BATCH_PREFIX, ArBatch, DiffusionBatch, ImageCondition, ImageStep, SequenceStep
from omni_notebook.worker.reports import WorkerSpec
from omni_notebook.worker.worker import Worker

PROMPTS = ("a red star above a blue circle", "two blue squares", "a pink heart with a red star to its left")
TOKENS = 12


class WorkerRank:
    """One worker of one stage of the demo; every call that is not here goes to it."""

    def __init__(self, rank, size, stage_id, timeout_s=30.0):
        config = load_pipeline("demo").stages[stage_id]
        self._folder = config.model
        where = RankId(stage_id, 0, rank)
        spec = WorkerSpec(where=where, config=config, tensor_parallel_size=size, collective_timeout_s=timeout_s)
        self._worker = Worker(spec)

    def __getattr__(self, name):
        return getattr(self._worker, name)

    def parameters(self):
        """Addresses, and bytes, of the model's parameters."""
        parameters = list(self._worker._runner._model.parameters())
        return [p.data_ptr() for p in parameters], sum(p.nbytes for p in parameters)

    def golden(self, temperature=0.0):
        """Tokens and hidden states of a batch of sequences, or the bytes of a batch of images."""
        return self._write(temperature) if self._worker._spec.where.stage_id == 0 else [self.draw()]

    def _write(self, temperature):
        tokenizer = TextTokenizer.load(self._folder)
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        written, states = [list(prompt) for prompt in prompts], []
        for turn in range(TOKENS):
            steps = tuple(
                SequenceStep(
                    slot=slot,
                    token_ids=tuple(ids) if turn == 0 else (ids[-1],),
                    start=0 if turn == 0 else len(ids) - 1,
                    prompt_len=len(prompt),
                    seed=slot,
                    temperature=temperature,
                    top_p=0.95,
                    top_k=0,
                    want_hidden=True,
                )
                for slot, (ids, prompt) in enumerate(zip(written, prompts, strict=True))
            )
            for ids, answer in zip(written, self._worker.execute(ArBatch(steps)), strict=True):
                ids.append(answer.token_id)
                states.append(answer.hidden)
        return [written, *states]

    def draw(self, steps=6, batch_id="batch"):
        """Three images, with and without hidden states: uint8 (3, height, width, channels)."""
        generator = np.random.default_rng(3)
        images = tuple(
            ImageStep(
                key=seed,
                seed=seed,
                condition=ImageCondition(
                    plan_ids=tuple(int(i) for i in generator.integers(0, 24, 14)),
                    hidden=generator.standard_normal((14, 256)).astype(np.float32) if seed else None,
                ),
            )
            for seed in range(3)
        )
        batch = DiffusionBatch(batch_id=batch_id, images=images, num_inference_steps=steps, guidance_scale=2.0)
        runner, computed = self._worker._runner, []
        execute = runner.execute

        def keeping(*known):
            computed.append(execute(*known))
            return computed[0]

        runner.execute = keeping  # the worker copies out one rank's images; here every rank's are looked at
        try:
            self._worker.execute(batch)
        finally:
            del runner.execute
        assert len(self._worker.collect(batch_id).result()) == (3 if self._worker._spec.where.rank == 0 else 0)
        return np.stack([answer.pixels for answer in computed[0].finish()])

    def draw_until_cancelled(self, culprit, after_s):
        """A long batch that one rank is told to cancel."""
        batch_id = f"{BATCH_PREFIX}long-{culprit}"
        if self._worker._spec.where.rank == culprit:
            threading.Timer(after_s, self._worker.cancel, (batch_id,)).start()
        return self.draw(1000, batch_id)

    def break_next_batch(self, culprit):
        """Make one rank raise within its next forward pass."""
        if self._worker._spec.where.rank == culprit:
            model = self._worker._runner._model

            def broken(*_args):
                hook.remove()
                msg = "injected"
                raise MemoryError(msg)

            hook = model.blocks[2].register_forward_pre_hook(broken)

    def sleep(self, task_id, level):
        """Only the first step: whether all ranks can decides about the second."""
        self._worker.prepare_sleep(SleepTask(task_id=task_id, level=level))

    def wake(self, task_id):
        return self._worker.prepare_wake(WakeTask(task_id=task_id))

    def weights_checksum_holds(self):
        return self._worker._pool.verify_checksum(WEIGHTS)
