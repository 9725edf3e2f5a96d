"""The fair leaderboard: all methods by one protocol, each tuned by as many candidates, and whom they harm."""
