"""Answer a batch file of OpenAI's form.

    python examples/openai_batch.py MODEL [requests.jsonl]

MODEL is a folder, a .gguf file or a hub name of an instruct model. Without a file of requests, a small one is written.
Answers come to answers.jsonl beside the requests, and lines that failed to answers.errors.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llmbatch

QUESTIONS = ("What is the capital of France?", "Name a prime number above 10.", "Is water wet?")


def write_requests(file: Path) -> None:
    """Write a line for each question, and one that asks for something that nobody knows."""
    with file.open("w", encoding="utf-8") as lines:
        for number, question in enumerate(QUESTIONS):
            body = {"messages": [{"role": "user", "content": question}], "max_completion_tokens": 24}
            asked = {"custom_id": f"question-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(asked) + "\n")
        wrong = {"prompt": "Once upon a time", "max_tokens": 8, "temprature": 0.5}
        asked = {"custom_id": "story", "method": "POST", "url": "/v1/completions", "body": wrong}
        lines.write(json.dumps(asked) + "\n")


def main(model: str, requests: Path) -> None:
    """Answer the requests, and print what became of each."""
    if not requests.exists():
        write_requests(requests)
    answers = requests.with_name("answers.jsonl")
    report = llmbatch.run(requests, answers, model=model)
    for line in map(json.loads, answers.read_text(encoding="utf-8").splitlines()):
        choice = line["response"]["body"]["choices"][0]
        print(f"{line['custom_id']}: {choice['message']['content'] if 'message' in choice else choice['text']}")
    for line in map(json.loads, answers.with_suffix(".errors.jsonl").read_text(encoding="utf-8").splitlines()):
        print(f"{line['custom_id']} failed: {line['response']['body']['error']['message']}")
    print(f"{report.rows} lines, {report.errors} failed, {report.output_tokens} tokens")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL [requests.jsonl]")
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "requests.jsonl"))
