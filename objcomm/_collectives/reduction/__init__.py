"""All ranks' objects combined into one: the operators, and how operands reach them.

Operators and structures know only objects; ``folding`` and ``leafwise`` send messages.
"""
