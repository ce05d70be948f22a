"""A user-space switch: it joins the hosts' TAP devices and applies its links' settings to every frame."""
