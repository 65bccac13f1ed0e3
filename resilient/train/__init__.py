"""The reference job: model, data, optimizer, loop and evaluation."""
