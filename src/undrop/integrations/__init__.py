"""undrop in the trainers of other libraries.

``import undrop`` imports none of this: each module needs the extra with its name.

- :mod:`undrop.integrations.transformers`: ``UndropTrainer``, and ``UndropMixin`` for your own
  Trainer.
- :mod:`undrop.integrations.lightning`: ``UndropCallback``.

Accelerate needs no module: ``accelerator.backward(step.total)``, and
``accelerator.register_for_checkpointing(objective)``.
"""
