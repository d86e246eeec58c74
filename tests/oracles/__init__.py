"""Our losses, weights and advantages against TRL's and verl's, which `make test-oracles` installs."""
