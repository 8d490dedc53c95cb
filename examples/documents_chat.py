"""Documents in any order under a chat: each is computed once, whatever stands before it in a prompt.

Run it: python examples/documents_chat.py
It wants pip install 'kvdb[demo]', or a clone. The small model of the demo knows headings and codes, and little else.
"""

import kvdb
from engine_adapter.models import sections
from engine_adapter.rag import RagEngine

DOCUMENTS = 3
# The model was trained on plain text, so its chat has no marks; yours has a template of its own.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    model, tokenizer = sections.load()
    tokenizer.chat_template = TEMPLATE
    text = sections.document(tokenizer, 600, seed=0, sections=DOCUMENTS, records=6, facts=2)
    # A document begins at each heading, whose word is the third token of its sentence.
    begins = sorted({question.heading - 2 for question in text.questions if question.heading})
    documents = [text.ids[begin:end] for begin, end in zip(begins, [*begins[1:], len(text.ids)], strict=True)]

    with kvdb.connect() as db, RagEngine(model, tokenizer, db, chat=True) as rag:
        for number, ids in enumerate(documents):
            info = rag.upsert(f"doc-{number}", tokenizer.decode(ids), metadata={"page": number})
            print(info.id, info.tokens, "tokens")

        asked = next(question for question in text.questions if question.kind == "heading")
        for order in ([0, 1, 2], [2, 0, 1]):  # no order was there before; no document is computed again
            docs = [f"doc-{number}" for number in order]
            answer = rag.chat([{"role": "user", "content": asked.text}], docs, max_new_tokens=5)
            print(docs, answer.text.strip(), "right" if asked.answered_by(answer.text) else "wrong", answer.usage, sep="; ")

        for piece in rag.stream_chat([{"role": "user", "content": asked.text}], docs=["doc-0"], max_new_tokens=5):
            print(piece, end="")  # as it comes
        print()


if __name__ == "__main__":
    main()
