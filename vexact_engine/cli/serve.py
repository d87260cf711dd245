"""`vexact serve`: a model behind OpenAI's API."""

import logging
import os
import signal

from . import options


def add_serve(commands) -> None:
    serve = options.command(
        commands,
        "serve",
        run_serve,
        "an OpenAI-compatible server (completions, chat, streaming)",
        (
            "vexact serve DIR",
            "VEXACT_API_KEY=... vexact serve DIR --host 0.0.0.0 --device cuda",
            "vexact serve DIR --device cuda --replicas 8 --max-restarts 2",
        ),
    )
    serve.add_argument("model", metavar="DIR|GGUF|HUB-ID", help="safetensors directory, GGUF file or Hub name")
    options.adapter(serve)
    options.tokenizer(serve)
    options.where(serve)
    options.engine(serve)
    replicas = serve.add_argument_group("replicas")
    replicas.add_argument(
        "--replicas",
        type=options.positive,
        metavar="N",
        help="engines in processes of their own, each with a GPU, or one a stage and rank (none: one, in this process)",
    )
    replicas.add_argument(
        "--max-restarts", type=options.count, default=0, metavar="N", help="of those that died, all together (0)"
    )
    replicas.add_argument("--ray", action="store_true", help="as actors on whichever machines of Ray's cluster")
    options.parallel(replicas)
    server = serve.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1: this machine alone)")
    server.add_argument("--port", type=options.count, default=8000, metavar="N", help="0 takes one that is free (8000)")
    server.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="what requests call it (its folder's name; repeat)"
    )
    server.add_argument(
        "--api-key-file", metavar="FILE", help="keys, one a line (none); or one in the environment: VEXACT_API_KEY"
    )
    server.add_argument("--allow-no-key", action="store_true", help="without a key on a host that others can reach")
    server.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="for pages there (CORS; none; repeat)"
    )
    server.add_argument(
        "--allow-image-hosts",
        action="append",
        default=[],
        metavar="HOST",
        help="fetch images and videos from there, if it is public (none: data: URIs alone; HOST or HOST:PORT; repeat)",
    )
    limits = serve.add_argument_group("limits")
    limits.add_argument(
        "--max-requests", type=options.positive, default=1024, metavar="N", help="requests at once (1024)"
    )
    limits.add_argument(
        "--max-samples", type=options.positive, default=1024, metavar="N", help="samples of a request (1024)"
    )
    limits.add_argument(
        "--max-prompt-tokens", type=options.positive, metavar="N", help="tokens of a prompt (what fits)"
    )
    limits.add_argument(
        "--max-tokens", type=options.positive, metavar="N", help="tokens generated for a sample (what fits)"
    )
    limits.add_argument("--max-images", type=options.positive, metavar="N", help="images of a prompt (what fits)")
    limits.add_argument(
        "--max-logprobs",
        type=options.count,
        default=20,
        metavar="N",
        help="likeliest tokens reported at each position (20)",
    )
    limits.add_argument(
        "--max-body-mb", type=options.positive, default=16, metavar="N", help="megabytes of a request (16)"
    )
    limits.add_argument(
        "--request-timeout", type=float, default=600, metavar="S", help="seconds until a request is answered (600)"
    )
    limits.add_argument(
        "--body-timeout", type=float, default=30, metavar="S", help="seconds until its body has arrived (30)"
    )
    limits.add_argument(
        "--header-timeout", type=float, default=20, metavar="S", help="seconds until its header has arrived (20)"
    )
    limits.add_argument(
        "--max-connections", type=options.positive, metavar="N", help="connections at once (what open files allow)"
    )
    limits.add_argument(
        "--send-timeout", type=float, default=60, metavar="S", help="seconds that a client may take nothing of it (60)"
    )
    limits.add_argument(
        "--drain-seconds", type=float, default=30, metavar="S", help="seconds for what is under way after SIGTERM (30)"
    )
    levels = ["debug", "info", "warning", "error"]
    serve.add_argument("--log-level", choices=levels, default="info", help="(info: a line for each request)")


def run_serve(args) -> int:
    from ..config import EngineConfig
    from ..core import garbage
    from ..serve.server import Server
    from ..serve.settings import Settings

    settings = Settings(
        host=args.host,
        port=args.port,
        model_names=None if args.served_model_name is None else tuple(args.served_model_name),
        api_keys=_keys(args.api_key_file),
        allow_no_key=args.allow_no_key,
        max_requests=args.max_requests,
        max_samples=args.max_samples,
        max_prompt_tokens=args.max_prompt_tokens,
        max_tokens=args.max_tokens,
        max_images=args.max_images,
        max_logprobs=args.max_logprobs,
        max_body_bytes=args.max_body_mb << 20,
        request_timeout=args.request_timeout,
        body_timeout=args.body_timeout,
        header_timeout=args.header_timeout,
        max_connections=args.max_connections,
        send_timeout=args.send_timeout,
        drain_seconds=args.drain_seconds,
        allow_origins=tuple(args.allow_origin),
        allow_image_hosts=tuple(args.allow_image_hosts),
    )
    config = EngineConfig(**options.engine_of(args), **options.parallel_of(args))
    options.expect_with(args, args.replicas is not None, "--replicas", "--max-restarts", "--ray")
    device = options.device(args.device)
    options.check_engine(args, device)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with Server(settings) as server:
        with options.progress(args) as progress:
            progress("load", 0, 1)
            engine = _engine(args, device, config)
            garbage.freeze()

        def ready() -> None:
            print(f"vexact serve: {engine.name} at {server.url}/v1", flush=True)

        with engine:
            server.run(engine, ready)
        return 130 if server.signal == signal.SIGINT else 0


def _engine(args, device, config):
    """One in this process, or several in their own behind one front."""
    if args.replicas is None:
        from ..engine import Engine

        if config.processes > 1:
            choices = options.tokenizer_of(args)
            return Engine.from_pretrained(args.model, device=device, dtype=args.dtype, config=config, **choices)
        return Engine(options.load(args, device), config)
    from ..parallel.replicas import Replicas

    choices = {"device": str(device), "dtype": args.dtype, "max_restarts": args.max_restarts, "ray": args.ray}
    choices |= options.tokenizer_of(args)
    return Replicas.from_pretrained(args.model, replicas=args.replicas, config=config, **choices)


def _keys(path: str | None) -> tuple[str, ...]:
    keys = [os.environ["VEXACT_API_KEY"]] if os.environ.get("VEXACT_API_KEY") else []
    if path is not None:
        with open(path, encoding="utf-8") as file:
            found = [line.strip() for line in file if line.strip()]
        if not found:
            raise ValueError(f"--api-key-file: {path} holds no key")
        keys += found
    return tuple(keys)
