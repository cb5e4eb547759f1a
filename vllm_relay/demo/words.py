# SPDX-License-Identifier: Apache-2.0
"""The words of the demo: every word list is disjoint from the others, so a word has one role."""

from __future__ import annotations

_CITIES = """
    Aberdeen Accra Amsterdam Ankara Antwerp Athens Auckland Baku Barcelona Bari Basel Beirut
    Belfast Bergen Berlin Bilbao Bogota Bologna Bordeaux Boston Bremen Brest Bristol Brussels
    Budapest Cadiz Cairo Calais Cardiff Casablanca Chicago Cologne Copenhagen Cork Dakar Delhi
    Dresden Dublin Dundee Durban Edinburgh Florence Galway Gdansk Geneva Genoa Ghent Glasgow
    Granada Hamburg Hanoi Havana Helsinki Istanbul Izmir Jakarta Kiel Kobe Krakow Kyoto Lagos
    Leeds Leipzig Lille Lima Lisbon Liverpool London Lucerne Lyon Madrid Malaga Malmo Manila
    Marseille Milan Montreal Munich Nairobi Nantes Naples Nice Odessa Oporto Osaka Oslo Ottawa
    Oxford Palermo Paris Parma Perth Pisa Prague Quebec Quito Reykjavik Riga Rome Rotterdam
    Salzburg Santiago Seattle Seoul Seville Sofia Split Stockholm Sydney Tallinn Tampere Tangier
    Tokyo Toledo Toronto Toulouse Trieste Tromso Tunis Turin Utrecht Valencia Venice Verona Vienna
    Vilnius Warsaw Zagreb Zurich
"""

_PLACES = """
    abbey academy airport aquarium archive arena armoury bakery bank barracks bazaar boatyard
    brewery bridge canal castle cathedral chapel cinema circus clinic college courthouse customs
    dairy dockyard embassy exchange factory ferry forge fountain gallery garden granary harbour
    hospital hostel hotel laboratory library lighthouse lock market mill mint monastery museum
    observatory opera orchard palace pier prison quarry racecourse school shipyard square stadium
    station theatre university warehouse
"""

_ADJECTIVES = """
    amber ancient azure bitter blazing bold brazen bright bronze calm careful copper coral crimson
    crystal distant eager early electric emerald fading frozen gentle gilded golden hidden hollow
    humble indigo iron ivory jolly lonely marble mellow misty noble northern olive painted patient
    polished proud purple quiet rapid rugged rustic sacred scarlet silent silver slender smoky
    solemn southern stormy sturdy sunny tangled velvet violet wandering winter wooden
"""

_NOUNS = """
    acorn anchor anvil apple arrow badger barrel beacon bear bell cactus candle carpet cherry
    clover comet compass cricket crown dagger dolphin dragon eagle engine falcon feather fern
    fiddle flute fox glacier hammer harp hawk heron island kettle ladder lantern lemon lion maple
    meadow mirror otter owl pebble pepper piano rabbit raven ribbon river saddle salmon sparrow
    spoon squirrel thistle tiger trumpet turtle violin willow
"""

_PROSE = """
    a an and answer are asked at for find gate every holds in is it keeper league ledger of on
    open page please read tell the to traveller two us was watchword watchwords what which who
    words written you
"""

CITIES, PLACES, ADJECTIVES, NOUNS, PROSE = (
    words.split() for words in (_CITIES, _PLACES, _ADJECTIVES, _NOUNS, _PROSE)
)
