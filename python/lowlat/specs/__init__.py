"""Specs: what SGLang's registry looks up. Each file is for one vendor's contract."""
