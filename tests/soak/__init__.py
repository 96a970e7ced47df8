"""A soak test: random operations, with results checked against a model and resources counted.

``python -m tests.soak --minutes 10 --world 4 --seed 1`` runs it and prints its figures, and
``python -m tests.soak --broadcasts 100000`` makes that many small broadcasts in a row. The suite
runs short forms of both. A round depends only on the seed and the round's number, so every rank
makes the same plan and predicts every other rank's part in it.
"""
