"""LoRA adapters, the head's too, under transformers' Trainer; one line makes it streamed.

python examples/lora.py --tokens 1024 --steps 10
"""

from __future__ import annotations

import tiny
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main() -> None:
    arguments = tiny.arguments(__doc__, tokens=256, steps=6)
    tokenizer = tiny.tokenizer()
    rows = [
        tokenizer(tiny.count_up(37 * i, arguments.tokens - 11 * (i % 5)))
        for i in range(4 * arguments.steps)
    ]
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "lm_head"]
    )
    model = get_peft_model(tiny.model(), adapters)
    if not arguments.plain:
        model.compile(backend="streambp", dynamic=True)  # the line
    trainer = Trainer(
        model,
        args=TrainingArguments(**tiny.training(arguments.steps)),
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    tiny.report(trainer.state.log_history)


if __name__ == "__main__":
    main()
