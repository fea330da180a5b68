from median import median

assert median([9, 1, 5]) == 5
