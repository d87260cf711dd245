"""What no description says of a model: the tokens that its embedding has, how long a text it was made for."""

import torch


def vocab_size(model: torch.nn.Module) -> int:
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        got = type(embedding).__name__
        raise TypeError(f"Engine: model: the embedding of the {type(model).__name__} is a {got}, expected an Embedding")
    return embedding.weight.shape[0]


def max_positions(model: torch.nn.Module, longrope: str | None = None) -> int | None:
    """How long a text the model was made for; None where it does not say. With YaRN that is its factor times the length
    before it, which model cards have one write down beside max_position_embeddings as it was. With "short" factors it
    is longrope's original length, and dynamic's max_position_embeddings: behind that they are not the model's."""
    config = model.config.get_text_config(decoder=True)  # the decoder's, where a composite one wraps it
    said = getattr(config, "max_position_embeddings", None)
    given, short = getattr(config, "rope_parameters", None) or {}, []
    for rope in (given, *given.values()):  # of all layers, or by their kind
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            short.append(rope.get("original_max_position_embeddings"))
        elif kind == "dynamic":
            short.append(getattr(config, "max_position_embeddings", None))
        if kind != "yarn":
            continue
        before = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        stretched = int(before * rope["factor"]) if before and rope.get("factor") else 0
        said = max(said or 0, stretched) or None
    if longrope == "short" and any(short):
        said = min(filter(None, (said, *short)))
    if said is not None and said < 2:  # a token of prompt, and one that is generated
        raise ValueError(f"Engine: model: max_position_embeddings is {said} in its config, expected 2 or more")
    return said
