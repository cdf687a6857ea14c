"""An SGLang frontend program against a server with tenants. Nothing changes but the API key.

python examples/frontend.py --url http://127.0.0.1:30000 --api-key demo-key-acme
"""

import argparse

import sglang as sgl


@sgl.function
def compare(s, first: str, second: str):
    """Describe two things side by side; both branches share the prefix's KV pages."""
    s += sgl.system("You are a helpful assistant. Answer in one short sentence.")
    s += sgl.user(f"I will ask you about {first} and {second}.")
    s += sgl.assistant("Good, ask me.")
    branches = s.fork(2)
    for branch, thing in zip(branches, (first, second), strict=True):
        branch += sgl.user(f"What is {thing}?")
        branch += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))
    s += sgl.user("Thank you. " + " ".join(branch["answer"] for branch in branches))
    s += sgl.assistant(sgl.gen("closing", max_tokens=16, temperature=0))
    s.set_var("answers", [branch["answer"] for branch in branches])


@sgl.function
def chat(s, questions: list[str]):
    """Hold a conversation; every turn reuses the pages of all turns before it."""
    s += sgl.system("You are a helpful assistant.")
    for number, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=32, temperature=0))


def main() -> None:
    """Run both programs and print what came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", required=True)
    arguments = parser.parse_args()
    backend = sgl.RuntimeEndpoint(arguments.url, api_key=arguments.api_key)
    sgl.set_default_backend(backend)
    state = compare.run(first="a river", second="a glacier")
    print("compare:", state["answers"], state["closing"], sep="\n  ")
    talk = chat.run(questions=["What is the capital of France?", "And of Italy?"])
    print("chat:", talk["answer_0"], talk["answer_1"], sep="\n  ")


if __name__ == "__main__":
    main()
