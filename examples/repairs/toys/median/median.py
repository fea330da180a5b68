def median(numbers):
    """The middle number of an odd count of numbers."""
    return numbers[len(numbers) // 2]
