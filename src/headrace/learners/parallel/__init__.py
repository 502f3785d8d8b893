"""A learner of several ranks: what lies where, and the processes that compute together."""
