"""A switch in user space: it joins the hosts' TAP devices and gives every frame what its links were asked for."""
