"""What training loops ask of the operations: models, metrics, data, and who computes what.

Built on the operations of the rooms below; knows nothing of how the ranks were started.
"""
