"""What models of known families need beyond pairs of linear layers that are cut together: latent attention, experts."""
