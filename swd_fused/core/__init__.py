"""One optimizer step, and what is kept between steps. It knows other folders only by the protocols declared here."""
