"""Extensions of Quartet's services, one of each kind. Each module is imported by one service only, in its environment.

short.py          a verifier: a completion of few words (reward service)
guess_number.py   an environment: too low, too high (rollout)
best_of_group.py  an algorithm: learn from the best completion of each group (trainer)
parrot.py         an engine: repeats the prompt (rollout)
sockets.py        a transport of weights over plain TCP: both ends (trainer, rollout)
"""
