"""Objects of all ranks combined into one: the operators, and the ways an operand takes to them.

Operators and structures know objects only; ``folding`` and ``leafwise`` move messages.
"""
