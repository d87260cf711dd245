"""`vexact doctor`: what runs here, whether the contract holds, and fast kernels verified ahead of time."""

from . import options


def add_doctor(commands) -> None:
    doctor = options.command(
        commands,
        "doctor",
        run_doctor,
        "what runs here, and a quick check that the contract holds",
        ("vexact doctor", "vexact doctor --device cpu --json -", "vexact doctor --admit --model DIR --training"),
    )
    doctor.add_argument("--device", choices=["cpu", "cuda"], help="check this device alone (all there are)")
    options.json_file(doctor, "the findings")
    ahead = doctor.add_argument_group("fast kernels, verified ahead of a model's first run (GPU)")
    ahead.add_argument(
        "--admit", action="store_true", help="verify them for the model or matrices given below, and nothing else"
    )
    ahead.add_argument("--model", metavar="DIR|HUB-ID", help="those of a model, from its configuration (none)")
    ahead.add_argument(
        "--shapes", type=options.shapes, metavar="NxK,NxK", help="weights of N output and K input features (none)"
    )
    ahead.add_argument(
        "--rows", type=options.positive, default=512, metavar="N", help="steps of up to so many rows (512)"
    )
    ahead.add_argument(
        "--training", type=options.positive, nargs="?", const=8192, metavar="N",
        help="what a trainer's batches of N tokens need, gradients too (not; 8192 without N)",
    )  # fmt: skip
    ahead.add_argument("--page-size", type=options.positive, default=16, metavar="N", help="of the engine's cache (16)")
    ahead.add_argument("--kv-segment", type=options.positive, metavar="N", help="as engine and trainer set it (none)")
    ahead.add_argument("--dtype", type=options.dtype, default="bfloat16", metavar="TYPE", help="bf16 (default) or fp16")


def run_doctor(args) -> int:
    options.check_writable(args.json)
    if args.admit:
        options.expect_without(args, "--admit, which is for GPUs", "--device")
        return _admit(args)
    dependents = ("--model", "--shapes", "--rows", "--training", "--page-size", "--kv-segment", "--dtype")
    options.expect_with(args, False, "--admit", *dependents)
    if args.device:
        options.visible_device(args.device)
    import vexact_ops as vx

    from ..proof import doctor

    description = doctor.describe()
    options.print_pairs("Environment", description)
    options.print_pairs("Backends", vx.backends())
    devices = [args.device] if args.device else doctor.devices()
    numerics = {device: vx.numerics(device) for device in devices}
    for device, found in numerics.items():
        rooms = ", ".join(f"{room} {revision}" for room, revision in found["rooms"].items())
        options.print_pairs(
            f"Numerics on {device}", {"class": found["class"], "contract": found["contract"], "rooms": rooms}
        )
    checks = []
    for device in devices:
        print(f"Contract on {device}")
        for check in doctor.self_check(device):
            checks.append(check)
            mark = "ok    " if check.ok else "FAILED"
            print(f"  {mark}  {check.room:<22} {check.dtype:<9} {check.claim}  ({check.seconds:.1f} s)")
            if not check.ok:
                print(f"          {check.error}")
    failed = sum(not check.ok for check in checks)
    print(f"\n{len(checks) - failed} of {len(checks)} checks hold")
    if args.json:
        from dataclasses import asdict

        found = {"environment": description, "backends": vx.backends(), "numerics": numerics}
        options.write_json(args, found | {"checks": [asdict(check) for check in checks]})
    return 1 if failed else 0


def _admit(args) -> int:
    if not (args.model or args.shapes):
        raise ValueError("--admit: expected --model DIR or --shapes NxK,NxK")
    import torch

    import vexact_ops as vx

    from ..proof import doctor

    try:
        options.visible_device("cuda")
    except ValueError:
        text = "--admit: kernels are verified on the GPU that they are for, and torch sees none here"
        raise ValueError(text) from None
    found = vx.admit(
        doctor.needs(args.model, args.shapes or ()),
        rows=args.rows,
        training_rows=[args.training] if args.training else (),
        dtype=getattr(torch, args.dtype),
        page_size=args.page_size,
        kv_segment=args.kv_segment,
        progress=not args.quiet,
    )
    for decision in found:
        print(f"{decision.key}: {options.shorten(str(decision.chosen.name), 76)}  ({decision.seconds:.2f} s)")
    for key, what in found.refused:
        print(f"refused for {key}: {what}")
    verified = sum(len(decision.verdicts) for decision in found)
    print(f"\n{len(found)} kinds of calls, {verified} kernels verified, {len(found.refused)} refused", end="")
    print(f" ({found.seconds:.1f} s)")
    if args.json:
        from dataclasses import asdict

        record = [
            {"key": d.key, "chosen": d.chosen.name, "why": d.why, "seconds": d.seconds,
             "verdicts": [asdict(v) for v in d.verdicts]}
            for d in found
        ]  # fmt: skip
        options.write_json(args, {"admissions": record})
    return 0
