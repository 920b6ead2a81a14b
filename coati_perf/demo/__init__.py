"""The PPO trainer that ``coati-perf demo`` runs: small, real, and readable in one sitting.

Read :mod:`coati_perf.demo.trainer` to see where a trainer calls the hooks. Everything is made from
configurations, so nothing is downloaded: a Llama policy learns on the CPU to answer prompts with
words that a frozen Llama reward model scores. Needs ``transformers`` and ``tqdm``; the core of
coati_perf needs neither and imports nothing from here.
"""
