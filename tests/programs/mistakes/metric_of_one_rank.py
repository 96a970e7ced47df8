"""Only rank 0 has an accuracy.

ranks: 2
all: CollectiveError
    says average_metrics failed on rank 1: … lacks 'accuracy' … missing='skip'
"""

import objcomm

objcomm.init()
metrics = {"loss": 0.5}
if objcomm.is_main():
    metrics["accuracy"] = 0.9
objcomm.metrics.average_metrics(metrics)
