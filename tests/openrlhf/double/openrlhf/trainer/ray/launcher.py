class RayActorGroup:
    """A model on its GPUs, which there are none of here."""

    def __init__(self, num_nodes, num_gpus_per_node, ray_actor_type, pg=None, **kwargs):
        pass

    def async_run_method(self, method_name, **kwargs):
        return []
