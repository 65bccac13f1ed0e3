"""Commands. The only room that knows Hydra and OmegaConf: below it there are plain dicts and frozen dataclasses."""
