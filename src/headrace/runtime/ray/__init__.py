"""A run on Ray: generators and verifiers as actors on as many machines as the cluster has.

The one place that imports ray. Controller, buffer and learner are what they are without it.
"""
