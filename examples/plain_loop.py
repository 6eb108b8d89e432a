"""Fine-tune a Hugging Face causal model in your own loop; one line makes it streamed.

python examples/plain_loop.py --tokens 4096 --steps 20
"""

from __future__ import annotations

import tiny
import torch


def main() -> None:
    arguments = tiny.arguments(__doc__, tokens=1024, steps=20)
    model = tiny.model()
    tokenizer = tiny.tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if not arguments.plain:
        model.compile(backend="streambp", dynamic=True)  # the line

    log = []
    for step in range(arguments.steps):
        length = arguments.tokens - 7 * (step % 5)
        ids = tokenizer(tiny.count_up(37 * step, length), return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, : length // 2] = -100  # the prompt
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"loss": loss.item()})
    tiny.report(log)


if __name__ == "__main__":
    main()
