"""Which objects of a class there are, and that looking for them disturbs no other thread."""

import threading

from torch import nn

from vexact_ops.patch.instances import instances


class One(nn.Module):
    pass


class Two(One):
    pass


class Left(Two):
    pass


class Right(Two):
    pass


class Both(Left, Right):
    pass


def test_all_of_a_class_and_those_derived_from_it():
    assert list(instances(One)) == []
    made = [One(), Two(), Left(), Right(), Both(), Both()]
    others = [nn.Module(), One, {"one": One}, (One, Two)]  # which are none, or refer to the class
    found = list(instances(One))
    assert {id(o) for o in found} == {id(o) for o in made} and len(found) == len(made) and len(others) == 4
    assert {id(o) for o in instances(Left)} == {id(made[2]), id(made[4]), id(made[5])}
    del found, made
    assert list(instances(One)) == []


def test_other_threads_make_tuples_meanwhile():
    """Of an iterator, which nobody else may hold while it is made."""
    failed, made, done = [], [], threading.Event()
    module, others = One(), [[] for _ in range(200_000)]  # to look through

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
        assert list(instances(One)) == [module]
    done.set()
    for thread in threads:
        thread.join()
    assert not failed and made and others
