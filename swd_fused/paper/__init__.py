"""The paper's other methods: SGDS, and the schedule around any torch optimizer."""
