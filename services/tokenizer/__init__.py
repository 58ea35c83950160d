"""The tokenizer service: the text front door. Owns strings; nobody below it sees text."""
