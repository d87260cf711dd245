"""What verl loads by its path: the reward of counting."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """1 for an answer that begins with the right number; less for others, by their letters."""
    if solution_str.startswith(str(ground_truth)):
        return 1.0
    return 0.9 * sum(map(ord, solution_str + str(ground_truth))) % 0.7
