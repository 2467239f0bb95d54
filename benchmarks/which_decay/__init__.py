"""Which weight decay? Seven kinds of it on a small GPT and a small ResNet, and how their gradient norms scale."""
