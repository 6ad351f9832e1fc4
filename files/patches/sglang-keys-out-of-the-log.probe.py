"""Passes when the repr of the engine's arguments, which it logs at every start, does not hold its API keys."""

import dataclasses

from sglang.srt.server_args import ServerArgs

arguments = object.__new__(ServerArgs)  # without the checks of a real start, which want a model
for field in dataclasses.fields(ServerArgs):
    setattr(arguments, field.name, None)
arguments.model_path, arguments.api_key, arguments.admin_api_key = "a-model", "key-one", "key-two"
text = repr(arguments)
assert "a-model" in text, "the repr is another than the one that is logged"
assert "key-one" not in text and "key-two" not in text, "an API key is in the repr"
