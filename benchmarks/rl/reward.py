"""verl's reward function: random models are never right, but some of their answers are further from it than others."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return sum(map(ord, solution_str)) % 17 / 17
