"""undrop in the trainers of others.

Nothing here is imported by ``import undrop``: each module needs the extra that it is named after.

- :mod:`undrop.integrations.transformers`: ``UndropTrainer``, and ``UndropMixin`` for a Trainer of
  one's own.
- :mod:`undrop.integrations.lightning`: ``UndropCallback``.

Accelerate needs no module: ``accelerator.backward(step.total)``, and
``accelerator.register_for_checkpointing(objective)``.
"""
