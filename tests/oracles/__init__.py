"""Our losses, weights and advantages against those of TRL and verl.

`make test-oracles` installs both; elsewhere these tests skip.
"""
