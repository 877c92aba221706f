"""One machine of a training job: its node process, launchers and rendezvous."""
