"""A tokenizer of one character a token, for the tiny models: printable ASCII and the end of a line."""

FIRST = 2
LINE = FIRST + 95


class Characters:
    def encode(self, text, *, add_special_tokens=True):
        return [LINE if c == "\n" else FIRST + ord(c) - 32 for c in text]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join("\n" if i == LINE else chr(i - FIRST + 32) if FIRST <= i < LINE else "~" for i in token_ids)


class Bytes:
    """One byte a token, so that a character may be several tokens."""

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(token_ids).decode(errors="replace")
