"""Answer the rows of a Ray dataset; each actor loads the model once.

    pip install 'llmbatch[ray]'
    python examples/ray_data.py MODEL

MODEL is a folder, a .gguf file or a hub name of an instruct model.
"""

from __future__ import annotations

import sys

import ray

from llmbatch import LLMOperator, map_dataset


def main(model: str) -> None:
    """Answer three questions in two ways and print the dataset's new columns."""
    answer = LLMOperator(model=model, template="What is the capital of {country}?", chat=True, max_tokens=24)
    dataset = ray.data.from_items([{"country": name} for name in ("France", "Japan", "Kenya")])
    # One plan for the whole dataset: shared prefixes stay together, and an actor that dies costs what it had in hand.
    show(map_dataset(dataset, answer))
    # A plan for each batch, in a pipeline that reads once: the larger the batch, the better the plan.
    show(dataset.map_batches(answer, concurrency=1, batch_size=50_000, batch_format="pyarrow"))


def show(answered: ray.data.Dataset) -> None:
    """Print the rows."""
    for row in answered.take_all():
        print(f"{row['country']}: {row['generated_text']} ({row['finish_reason']})")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL")
    main(sys.argv[1])
