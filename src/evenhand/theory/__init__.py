"""The paper's statements as functions: each one computed, most of them in more ways than one.

order_weights         order-weighted averages, and the weights of random draws for each rank
expected              Lemma 1: the expected S2M loss, and the average the paper says it equals
retrieval             the retrieval loss, and the losses that bound it
cvar                  the conditional value at risk, in three ways, and Lemma 3
consistency           Proposition 2: what the top-k' loss is consistent for
bias                  Lemma 4: how far the CVaR of a sample is from that of the law
bounds                Proposition 5: bounds of the CVaR by that of a sample
rademacher            the complexity of a class, which those bounds rest on
subpopulation_bounds  the certificate: what one's own data say of every subpopulation
even                  even-handed mining: the gap it measures, and the mixture it minimises
"""
