"""A switch in user space: it joins the hosts' TAP devices and makes every frame meet its links' settings."""
