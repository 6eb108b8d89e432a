"""Preference optimisation with TRL's DPOTrainer; one line makes it streamed.

    python examples/dpo.py --tokens 1024 --steps 10

The trained model and the reference model are both streamed.
"""

from __future__ import annotations

import tiny
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from streambp_fx.integrations import trl


def main() -> None:
    arguments = tiny.arguments(__doc__, tokens=256, steps=6)
    pairs = []
    for i in range(4 * arguments.steps):
        length = arguments.tokens - 8 - 11 * (i % 5)
        pairs.append(
            {
                "prompt": tiny.count_up(37 * i, 8),
                "chosen": " " + tiny.count_up(37 * i + 8, length),
                "rejected": " " + tiny.count_up(37 * i + 8, length // 2, step=-1),
            }
        )
    settings = {**tiny.training(arguments.steps), "learning_rate": 1e-4}
    trainer = DPOTrainer(
        tiny.model(),
        ref_model=tiny.model(),
        args=DPOConfig(**settings, max_length=arguments.tokens + 2),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tiny.tokenizer(),
    )
    if not arguments.plain:
        trl.stream(trainer)  # the line
    trainer.train()
    tiny.report(trainer.state.log_history)


if __name__ == "__main__":
    main()
