"""An OpenAI-compatible server in front of an Engine: `vexact serve`, or make_app(engine) in a server of one's own.

settings     what whoever starts it may choose
protocol     what a request may ask, field by field, and what becomes of the fields that are not served
generation   one request from its body to the last byte of its answer
answers      the shapes of answers and of their pieces, for both APIs
prompts      from what is asked to token ids, in threads of their own (lanes)
tokens       chats through the model's template, text and bytes of single tokens
attend       work that is done while its client is there, and no longer than its time
connections  how many there are, and how long a header may take
app          the routes, and what every request passes: id, key, limits, log
metrics      what Prometheus reads
server       a socket, signals, and an end that loses nobody's answer
"""

from .settings import Settings

__all__ = ["Settings"]
