"""Which modules have a module among theirs, and that looking for them disturbs no other thread."""

import threading

from torch import nn

from vexact_ops.patch.holders import modules_around


class Held(nn.Module):
    def __init__(self, inner, name="inner"):
        super().__init__()
        self.add_module(name, inner)


def test_all_that_hold_a_module():
    inner = nn.Linear(2, 2)
    assert list(modules_around(inner)) == []
    one, other = Held(inner), Held(inner, "of another name")
    around = nn.Sequential(one, nn.ReLU(), other, nn.Sequential(inner))
    kept = {"a": inner, "b": one}, [inner], Held(nn.Linear(2, 2))  # which hold it otherwise, or another one
    found = list(modules_around(inner))
    assert {id(m) for m in found} == {id(m) for m in (one, other, around, around[3])} and len(found) == 4
    assert list(modules_around(one)) == [around] and list(modules_around(around)) == []
    del one.inner
    assert one not in list(modules_around(inner)) and len(kept) == 3
    around.append(around)  # a module in itself
    assert set(modules_around(inner)) == {other, around, around[3]}


def test_other_threads_make_tuples_meanwhile():
    """Of an iterator, which nobody else may hold while it is made."""
    module, failed, made, done = nn.Linear(2, 2), [], [], threading.Event()
    around, others = Held(module), [[] for _ in range(200_000)]  # to look through

    def make():
        try:
            while not done.is_set():
                made.append(len(tuple(one + 1 for one in range(100))))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert list(modules_around(module)) == [around]
    done.set()
    for thread in threads:
        thread.join()
    assert not failed and made and others
