"""What any service process needs: settings, server, channels, errors, health, logs.

Knows nothing of tokens: it would serve a process that has nothing to do with language models.
"""
