"""One step, and what is kept between steps. Knows the other folders by the protocols that it declares."""
