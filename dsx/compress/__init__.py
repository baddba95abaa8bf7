"""What is done to a pseudo-gradient, and the bytes it becomes: generators that know no network.

Imports core alone. A compressor's declaration needs no torch; its channel, the running half, does.
"""
