"""Train and check the demo models: `python tools/train_demo.py [--device cuda] [--out FOLDER]`, or `--evaluate`.

Writes thinker/ and dit/ under --out and the judge beside the tests. Scores are printed as `name: value` lines.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import demo_diffusion  # noqa: E402  # isort: skip
import demo_judge  # noqa: E402  # isort: skip
import demo_thinker  # noqa: E402  # isort: skip
from demo_prompts import data_hash, make_examples  # noqa: E402  # isort: skip
from demo_training import Schedule  # noqa: E402  # isort: skip

from omni_notebook.models.flow import to_pil  # noqa: E402
from omni_notebook.models.scene import encode_plan, format_plan, parse_plan  # noqa: E402

if TYPE_CHECKING:
    from omni_notebook.models.dit import DiT

DEMO = ROOT / "omni_notebook" / "models" / "demo"
JUDGE = ROOT / "tests" / "data" / "judge.safetensors"
HELD_OUT_SEED = 20_000


def main() -> None:
    """Parse arguments, train the asked-for parts in order, evaluate."""
    args = _parser().parse_args()
    thinker, dit = args.out / "thinker", args.out / "dit"
    if not args.evaluate:
        for part in args.parts:
            {"thinker": _train_thinker, "judge": _train_judge, "dit": _train_dit}[part](args, thinker, dit)
    _evaluate(args, thinker, dit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=DEMO, help="folder for thinker/ and dit/")
    parser.add_argument("--judge", type=Path, default=JUDGE, help="file of the judge's weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=["thinker", "judge", "dit"], choices=["thinker", "judge", "dit"])
    parser.add_argument("--evaluate", action="store_true", help="train nothing, score what is there")
    parser.add_argument("--examples", type=int, default=1_000_000, help="prompts to train the thinker on")
    parser.add_argument(
        "--scenes", type=int, default=200_000, help="prompts to train the diffusion model on, twice that many scenes"
    )
    parser.add_argument("--thinker-steps", type=int, default=3500)
    parser.add_argument("--judge-steps", type=int, default=3000)
    parser.add_argument("--dit-steps", type=int, default=17_000)
    parser.add_argument("--dit-batch", type=int, default=1024)
    parser.add_argument("--dit-minutes", type=float, default=float("inf"), help="end the diffusion training by then")
    parser.add_argument("--count", type=int, default=500, help="held-out prompts and scenes to score")
    parser.add_argument("--guidance", type=float, default=demo_diffusion.GUIDANCE)
    parser.add_argument("--compile", action="store_true", help="torch.compile the diffusion training")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of generated scenes to this PNG")
    return parser


def _train_thinker(args: argparse.Namespace, thinker: Path, _dit: Path) -> None:
    examples = make_examples(args.examples, args.seed + 1)
    demo_thinker.write_folder(thinker, [text for text, _ in examples[:100_000]])
    schedule = Schedule(args.thinker_steps, 65536, 2e-3, args.device, args.seed, average=0.998)
    demo_thinker.train(thinker, examples, schedule, _metadata(schedule, data_hash(examples)))


def _train_judge(args: argparse.Namespace, _thinker: Path, _dit: Path) -> None:
    schedule = Schedule(args.judge_steps, 512, 2e-3, args.device, args.seed, average=0.998)
    demo_judge.train(args.judge, schedule, 200_000)


def _train_dit(args: argparse.Namespace, thinker: Path, dit: Path) -> None:
    examples = make_examples(args.scenes, args.seed + 2)
    model = demo_thinker.load(thinker, args.device)
    scenes = demo_diffusion.Scenes(model, thinker, examples, args.seed + 3, args.device)
    schedule = Schedule(
        args.dit_steps, args.dit_batch, 1.5e-3, args.device, args.seed, 0.9995, args.compile, args.dit_minutes * 60
    )
    demo_diffusion.train(dit, scenes, schedule, _metadata(schedule, data_hash(examples)))


def _metadata(schedule: Schedule, digest: str) -> dict[str, str]:
    return {"seed": str(schedule.seed), "batch": str(schedule.batch), "data_hash": digest}


def _evaluate(args: argparse.Namespace, thinker: Path, dit: Path) -> None:
    examples = make_examples(args.count, HELD_OUT_SEED, held_out=True)
    prompts, plans = [text for text, _ in examples], [plan for _, plan in examples]
    model = demo_thinker.load(thinker, args.device)
    free, _ = demo_thinker.write_plans(model, thinker, prompts, constrained=False)
    written, hidden = demo_thinker.write_plans(model, thinker, prompts)
    exact = [text == format_plan(plan) for text, plan in zip(written, plans, strict=True)]
    print(f"exact plans: {sum(exact) / len(exact):.4f}")
    print(f"exact plans without the grammar: {_same(free, [format_plan(plan) for plan in plans]):.4f}")
    for prompt, text, plan, right in zip(prompts, written, plans, exact, strict=True):
        if not right:
            print(f"  wrong: {prompt[:90]!r} -> {text} (meant: {format_plan(plan)})")
    judge = demo_judge.load(args.judge, args.device)
    print(f"judge on rendered truth: {demo_judge.score_on_truth(judge, device=args.device):.4f}")
    if not (dit / "model.safetensors").exists():
        return
    drawer = demo_diffusion.load(dit, args.device)
    heard = [parse_plan(text) for text in written]
    for name, share in demo_diffusion.evaluate(drawer, judge, heard, hidden, guidance=args.guidance).items():
        print(f"scenes right, {name}: {share:.4f}")
    _time_one(drawer, args)
    if args.sheet:
        _contact_sheet(drawer, [encode_plan(plan) for plan in heard[:64]], args)


def _same(texts: list[str], wanted: list[str]) -> float:
    return sum(a == b for a, b in zip(texts, wanted, strict=True)) / len(wanted)


def _time_one(drawer: DiT, args: argparse.Namespace) -> None:
    ids = torch.tensor([encode_plan(parse_plan("red star top center"))], device=args.device)
    demo_diffusion.draw(drawer, ids, None, guidance=args.guidance)
    started = time.perf_counter()
    demo_diffusion.draw(drawer, ids, None, guidance=args.guidance).cpu()
    print(f"seconds an image: {time.perf_counter() - started:.3f} ({torch.get_num_threads()} threads, {args.device})")


def _contact_sheet(drawer: DiT, ids: list[list[int]], args: argparse.Namespace) -> None:
    pictures = demo_diffusion.draw(drawer, torch.tensor(ids, device=args.device), None, guidance=args.guidance)
    sheet = Image.new("RGB", (8 * 66, -(-len(ids) // 8) * 66), (128, 128, 128))
    for place, picture in enumerate(to_pil(pictures * 2 - 1)):
        sheet.paste(picture, (place % 8 * 66 + 1, place // 8 * 66 + 1))
    args.sheet.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(args.sheet)


if __name__ == "__main__":
    main()
