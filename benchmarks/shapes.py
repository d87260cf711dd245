"""True dimensions of the models that the benchmarks speak of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One model. H hidden, I intermediate, Hq / Hk heads, D head dim, V vocabulary; E experts of which a token takes
    top_k, each with the intermediate size expert_I, in a layer of a mixture; N features and K reduction of one matrix
    alone, where it is of no model."""

    name: str
    H: int
    I: int  # noqa: E741
    Hq: int
    Hk: int
    D: int
    V: int
    layers: int
    E: int = 0
    top_k: int = 0
    expert_I: int = 0
    Dv: int = 0  # of values, where it is not D
    latent: tuple[int, int] | None = (
        None  # latent attention: the compressed key's size, and how much of it is the value
    )
    N: int = 0
    K: int = 0
    delta: tuple[int, int, int, int] | None = None  # key heads, value heads, dk and dv of its gated delta nets

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (N, K) of one layer's matrices as they are fused for speed, and of the head."""
        if self.N:
            return {"matrix": (self.N, self.K)}
        return {
            "qkv": ((self.Hq + 2 * self.Hk) * self.D, self.H),
            "o": (self.H, self.Hq * self.D),
            "gate_up": (2 * self.I, self.H),
            "down": (self.H, self.I),
            "head": (self.V, self.H),
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 30),
        Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936, 28),
        Shape("qwen3-1.7b", 2048, 6144, 16, 8, 128, 151936, 28),
        Shape("qwen3-4b", 2560, 9728, 32, 8, 128, 151936, 36),
        Shape("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 36),
        Shape("qwen3-14b", 5120, 17408, 40, 8, 128, 151936, 40),
        Shape("qwen3-32b", 5120, 25600, 64, 8, 128, 151936, 64),
        Shape("llama3-8b", 4096, 14336, 32, 8, 128, 128256, 32),
        Shape("qwen3-30b-a3b", 2048, 6144, 32, 4, 128, 151936, 48, E=128, top_k=8, expert_I=768),
        Shape("moonlight-16b-a3b", 2048, 11264, 16, 16, 192, 163840, 27, 64, 6, 1408, 128, (576, 512)),
        Shape("deepseek-v3", 7168, 18432, 128, 128, 192, 129280, 61, 256, 8, 2048, 128, (576, 512)),
        Shape("qwen3.5-9b", 4096, 12288, 16, 4, 256, 248320, 32, delta=(16, 32, 128, 128)),
        Shape("qwen3.5-35b-a3b", 2048, 512, 16, 2, 256, 248320, 40, 256, 8, 512, delta=(16, 32, 128, 128)),
        Shape("qwen3-next-80b-a3b", 2048, 512, 16, 2, 256, 151936, 48, 512, 10, 512, delta=(16, 32, 128, 128)),
        Shape("gpt-oss-20b", 2880, 2880, 64, 8, 64, 201088, 24, E=32, top_k=4, expert_I=2880),
        Shape("gpt-oss-120b", 2880, 2880, 64, 8, 64, 201088, 36, E=128, top_k=4, expert_I=2880),
        Shape("olmoe-1b-7b", 2048, 1024, 16, 16, 128, 50304, 16, E=64, top_k=8, expert_I=1024),
    )
}


def free(sizes: dict[str, int], fields: dict[str, str]) -> Shape:
    """A shape of no model: sizes as they were asked for, such as {"n": 4096, "k": 14336}, and the field of Shape that
    each is."""
    name = ",".join(f"{key}={value}" for key, value in sizes.items())
    empty = {field: 0 for field in ("H", "I", "Hq", "Hk", "D", "V", "layers")}
    return Shape(name, **empty | {fields[key]: value for key, value in sizes.items()})
