"""Tokenizers with chat templates, for the tiny models: one character a token, control tokens before them."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

START, END, THINK = "<|start|>", "<|end|>", "<think>"
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% if think is defined %}{{ '<think>' }}{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}{{ '<|start|>model\n' }}"
)
SYSTEM_LAST = (
    "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\n' %}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + (ns.system if loop.last else '') + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
NOWHERE = "{% for message in messages %}{{ message['content'] | upper }}{{ message['content'] }}{% endfor %}"
CHARACTERS = ["\n", *map(chr, range(32, 127))]
IDS = {START: 0, END: 1, **{character: 2 + i for i, character in enumerate(CHARACTERS)}, "\ufffd": 98, THINK: 99}


def fresh(template=CHATML):
    """A tokenizer in Rust. <think> is an added token that is not special, as some models have it."""
    rust = Tokenizer(models.WordLevel(IDS, unk_token="\ufffd"))
    rust.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rust.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END, bos_token=START, unk_token="\ufffd")
    made.add_tokens([THINK])
    made.chat_template = template
    return made


fast = cache(fresh)


class SlowCharacters(PreTrainedTokenizer):
    """The same in Python."""

    def __init__(self, **settings):
        super().__init__(eos_token=END, bos_token=START, unk_token="\ufffd", **settings)
        self.add_tokens([THINK])

    @property
    def vocab_size(self):
        return 99

    def get_vocab(self):
        return dict(IDS)

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return IDS.get(token, IDS["\ufffd"])

    def _convert_id_to_token(self, index):
        return next(token for token, i in IDS.items() if i == index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


@cache
def slow(template=CHATML):
    made = SlowCharacters()
    made.chat_template = template
    return made
