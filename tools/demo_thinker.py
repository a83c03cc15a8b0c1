"""Builds the demo thinker: tokenizer, plan grammar, training, and its score on held-out prompts."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from demo_training import Schedule, fit, save_weights
from omni_notebook.config import GRAMMAR_FILE
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.loaders import load_into, read_config
from omni_notebook.models.scene import (
    COLUMNS,
    FIELDS,
    MAX_OBJECTS,
    PLAN_LENGTH,
    PLAN_WORDS,
    ROWS,
    SEPARATOR,
    format_plan,
)
from omni_notebook.models.tokenizer import PlanGrammar, TextTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from demo_prompts import Example

SPECIALS = ("<pad>", "<bos>", "<eos>", "<plan>")
PAD, BOS, EOS, PLAN = range(4)
VOCAB_SIZE = 768
MAX_POSITIONS = 256
MAX_PROMPT_TOKENS = MAX_POSITIONS - PLAN_LENGTH - 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "float16",
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write_folder(folder: Path, corpus: Sequence[str]) -> None:
    """Write everything of the model folder but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(corpus)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS, **names}
    settings |= {"clean_up_tokenization_spaces": False, "max_prompt_tokens": MAX_PROMPT_TOKENS}
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    generation |= {"do_sample": False, "max_new_tokens": PLAN_LENGTH + 1}
    for name, data in {
        "config.json": CONFIG,
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    states = build_grammar({word: plan_token(tokenizer, word) for word in PLAN_WORDS})
    (folder / GRAMMAR_FILE).write_text(json.dumps({"start": 0, "states": states}) + "\n", encoding="utf-8")


def build_tokenizer(corpus: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE whose template turns a prompt into `<bos> prompt <plan>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plan_words = " ".join(word for word in PLAN_WORDS if word != SEPARATOR)
    tokenizer.train_from_iterator(itertools.chain(corpus, [plan_words] * len(corpus)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <plan>", special_tokens=[("<bos>", BOS), ("<plan>", PLAN)]
    )
    return tokenizer


def plan_token(tokenizer: Tokenizer, word: str) -> int:
    """Return the one id of a plan word; raise ValueError when the tokenizer splits it."""
    tokens = [SEPARATOR] if word == SEPARATOR else tokenizer.encode(word, add_special_tokens=False).tokens
    found: int | None = tokenizer.token_to_id(tokens[0])
    if len(tokens) != 1 or found is None:
        msg = f"the tokenizer splits the plan word {word!r} into {tokens}"
        raise ValueError(msg)
    return found


def build_grammar(token: dict[str, int]) -> list[dict[int, int]]:
    """Return the states of all valid plans: per state the tokens that may follow and where each leads."""
    numbers: dict[object, int] = {}
    states: list[dict[int, int]] = []

    def number(key: object) -> int:
        if key not in numbers:
            numbers[key] = len(states)
            states.append({})
            states[numbers[key]].update({symbol: number(target) for symbol, target in _moves(token, key)})
        return numbers[key]

    number((0, frozenset(), None))
    return states


def _moves(token: dict[str, int], key: Any) -> Iterator[tuple[int, Any]]:
    """A state is (words written of this object, cells used, row of this object); "end" follows the end token."""
    if key == "end":
        yield EOS, "end"
        return
    written, used, row = key
    if written < 2:
        yield from ((token[word], (written + 1, used, None)) for word in FIELDS[written])
    elif row is None:
        free = (word for word in ROWS if any((word, column) not in used for column in COLUMNS))
        yield from ((token[word], (2, used, word)) for word in free)
    elif written == 2:
        free = (word for word in COLUMNS if (row, word) not in used)
        yield from ((token[word], (4, used | {(row, word)}, row)) for word in free)
    else:
        yield EOS, "end"
        if len(used) < MAX_OBJECTS:
            yield token[SEPARATOR], (0, used, None)


class Encoder:
    """Turns examples into the ids that the thinker reads and writes."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = TextTokenizer.load(folder)
        raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._token = {word: plan_token(raw, word) for word in PLAN_WORDS}

    def plan(self, example: Example) -> list[int]:
        """Return the token ids of the plan and the end token."""
        words = format_plan(example[1]).replace(SEPARATOR, f" {SEPARATOR}").split()
        return [*(self._token[word] for word in words), EOS]

    def batches(self, examples: Sequence[Example], budget: int) -> list[tuple[Tensor, Tensor, list[int]]]:
        """Return (padded ids, prompt lengths, which examples), about `budget` tokens each, like lengths together."""
        rows = [(self.tokenizer.encode(example[0]), self.plan(example)) for example in examples]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
        found, start = [], 0
        while start < len(order):
            longest = len(rows[order[start]][0]) + PLAN_LENGTH + 1
            width = -(-longest // 16) * 16
            part = order[start : start + max(1, budget // width)]
            width = max(width, max(len(rows[i][0]) for i in part) + PLAN_LENGTH + 1)
            found.append((*_pad([rows[i] for i in part], width), part))
            start += len(part)
        return found


def _pad(rows: Sequence[tuple[list[int], list[int]]], width: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(rows), width), PAD, dtype=torch.int16)
    for place, (prompt, plan) in enumerate(rows):
        ids[place, : len(prompt) + len(plan)] = torch.tensor(prompt + plan, dtype=torch.int16)
    return ids, torch.tensor([len(prompt) for prompt, _ in rows])


def plan_states(model: Decoder, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states that write each plan token, (B, P + 1, hidden), and those tokens, (B, P + 1), 0 = none."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    hidden = model(ids, positions)
    place = lengths[:, None] + torch.arange(PLAN_LENGTH + 1, device=ids.device)
    return hidden.take_along_dim((place - 1)[..., None], 1), ids.take_along_dim(place, 1)


def train(folder: Path, examples: Sequence[Example], schedule: Schedule, metadata: dict[str, str]) -> None:
    """Train on examples and write model.safetensors."""
    device = schedule.device
    batches = [(i.to(device), n.to(device)) for i, n, _ in Encoder(folder).batches(examples, schedule.batch)]
    model = Decoder(DecoderConfig.from_hf(CONFIG)).to(device)
    torch.manual_seed(schedule.seed)
    for name, value in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(value, std=0.02)
    generator = torch.Generator().manual_seed(schedule.seed)

    def loss(_step: int) -> Tensor:
        ids, lengths = batches[int(torch.randint(len(batches), (1,), generator=generator))]
        states, target = plan_states(model, ids.long(), lengths)
        return F.cross_entropy(model.logits(states).flatten(0, 1).float(), target.flatten(), ignore_index=PAD)

    steps = fit("thinker", model, loss, schedule)
    save_weights(model, folder, {**metadata, "steps": str(steps)})


def load(folder: Path, device: str) -> Decoder:
    """Return the shipped thinker in float32."""
    model = Decoder(DecoderConfig.from_hf(read_config(folder))).to(device)
    load_into(model, folder)
    return model.eval()


@torch.inference_mode()
def write_plans(
    model: Decoder, folder: Path, prompts: Sequence[str], *, constrained: bool = True
) -> tuple[list[str], Tensor]:
    """Return greedy plans and the states that wrote them, (B, P, hidden); prefill one by one, decode together."""
    tokenizer, grammar = TextTokenizer.load(folder), PlanGrammar.load(folder)
    device, count = model.inv_freq.device, len(prompts)
    kv = torch.zeros(model.config.kv_shape(count, MAX_POSITIONS), device=device)
    last, lengths = [], []
    for slot, prompt in enumerate(prompts):
        ids = torch.tensor([tokenizer.encode(prompt)], device=device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        states = model(ids, positions, kv, torch.tensor([slot], device=device), kv_length=ids.shape[1])
        last.append(states[0, -1])
        lengths.append(ids.shape[1])
    hidden, position = torch.stack(last), torch.tensor(lengths, device=device)
    slots, state = torch.arange(count, device=device), [grammar.start] * count
    written: list[list[int]] = [[] for _ in prompts]
    collected = torch.zeros(count, PLAN_LENGTH, model.config.hidden_size, device=device)
    for place in range(PLAN_LENGTH + 1):
        tokens = _choose(model.logits(hidden), [grammar.allowed(s) for s in state] if constrained else None)
        for row, token in enumerate(tokens):
            done = bool(written[row]) and written[row][-1] == EOS
            if not done:
                written[row].append(token)
                state[row] = grammar.advance(state[row], token) if constrained else 0
            if place < PLAN_LENGTH and not done and token != EOS:
                collected[row, place] = hidden[row]
        following = torch.tensor(tokens, device=device)[:, None]
        hidden = model(following, (position + place)[:, None], kv, slots)[:, 0]
    return [tokenizer.decode(ids) for ids in written], collected


def _choose(logits: Tensor, allowed: list[list[int]] | None) -> list[int]:
    if allowed is not None:
        mask = torch.full_like(logits, float("-inf"))
        for row, tokens in enumerate(allowed):
            mask[row, tokens] = 0
        logits = logits + mask
    return [int(token) for token in logits.argmax(-1)]
