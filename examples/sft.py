"""Supervised fine-tuning with TRL's SFTTrainer; one line makes it streamed.

python examples/sft.py --tokens 1024 --steps 10
"""

from __future__ import annotations

import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from streambp_fx.integrations import trl


def main() -> None:
    arguments = tiny.arguments(__doc__, tokens=256, steps=6)
    texts = [
        {"text": tiny.count_up(37 * i, arguments.tokens - 11 * (i % 5))}
        for i in range(4 * arguments.steps)
    ]
    trainer = SFTTrainer(
        tiny.model(),
        args=SFTConfig(**tiny.training(arguments.steps), max_length=arguments.tokens + 2),
        train_dataset=Dataset.from_list(texts),
        processing_class=tiny.tokenizer(),
    )
    if not arguments.plain:
        trl.stream(trainer)  # the line
    trainer.train()
    tiny.report(trainer.state.log_history)


if __name__ == "__main__":
    main()
